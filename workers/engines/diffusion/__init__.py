"""Images and videos from text: the engines of diffusion workers."""
