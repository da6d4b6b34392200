"""A deployment by ``docker compose``, and the files of it that come from the code."""
