"""What a router knows: which target caches which prefix, what each has to do, which workers are lost."""
