"""What is sent, when, and by whom."""
