"""The APIs: from a body to a request, and from tokens to an answer."""
