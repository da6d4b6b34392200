"""Container images: the Containerfile, and what it installs."""
