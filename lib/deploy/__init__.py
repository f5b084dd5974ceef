"""What is installed, and how it gets to a host and back."""
