"""What the launcher of kind aws does at EC2, a concern a file."""
