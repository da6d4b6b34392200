"""What each target has to do."""
