"""What may lower accuracy, and whether it does."""
