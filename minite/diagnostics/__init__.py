"""What an engineer looks at: the log-prob gap in numbers, and a run as one HTML page. Never touches the loss."""
