"""What is sent, how it is timed, and what a number means."""
