"""Runs recorded requests again, and compares the answers.

Pure: ``comparison`` (a recorded request with its replay), ``report``. Shells: ``nats`` (a deployment of Penstock),
``http`` (any server with OpenAI's API), ``replay`` (the command).
"""
