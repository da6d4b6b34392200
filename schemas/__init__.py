"""The wire contract of Penstock: messages, subjects, streams and error codes.

Beside them is the code that every reader and writer must share: how blocks are named (``block_hashes``), how tokens are
de-duplicated (``token_dedup``), which line sums a request up (``summary``).

Imports no other package of Penstock. Every message is a frozen msgspec Struct in MessagePack. Fields are only ever
added, last and with a default; readers ignore unknown fields, so old and new processes share a log.
"""
