"""What SGLang's handoff needs besides itself; the stand-in moves KV through files. Only tests of it have this path."""
