"""What is behind the stand-in; nothing here exists in vLLM."""
