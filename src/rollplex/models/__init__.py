"""One adapter per model family; no other package knows a family by name."""
