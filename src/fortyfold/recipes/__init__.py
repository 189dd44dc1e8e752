"""Built-in recipes: TOML files, found by their names."""
