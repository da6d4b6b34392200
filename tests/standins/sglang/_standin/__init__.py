"""What the stand-in is made of; nothing here has a counterpart in SGLang."""
