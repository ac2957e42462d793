"""Recipes: a YAML file and overrides into a Config, with messages that name the key, the place and the remedy."""
