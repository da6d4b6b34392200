"""Real clients, in their newest versions, against one deployment of the demo model; and the table of what works.

Not part of the ordinary suite, as it installs some hundred packages: ``make test-clients``.
"""
