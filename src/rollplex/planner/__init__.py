"""What would happen: `rollplex plan`, computed from a recipe alone, without weights or devices (pure)."""
