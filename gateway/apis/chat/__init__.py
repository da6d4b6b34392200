"""Chat completions and completions of the OpenAI API: from a body to a request, and from tokens to a body."""
