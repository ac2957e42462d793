"""Who is resident: lifetimes, peak and plan of a step's device memory, and which residency moves are legal. Pure."""
