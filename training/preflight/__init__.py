"""What is refused before anything heavy is loaded."""
