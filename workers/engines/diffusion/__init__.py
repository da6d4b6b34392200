"""Pictures from text: the engines of diffusion workers."""
