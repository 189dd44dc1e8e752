"""Networks by name, from timm."""
