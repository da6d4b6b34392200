"""What an answer's text says: thoughts, content, tool calls. Pure: text pieces in, deltas of the OpenAI API out.

However the text is cut into pieces, the deltas add up to the same, so that every gateway shows the same answer. A
format that is broken off or broken never costs text: what cannot be read as a call is content.
"""
