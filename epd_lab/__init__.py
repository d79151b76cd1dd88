"""The laboratory beside the server: what measures, proves and draws; nothing that serves
imports it.

It is a distribution of its own (`epd-lab`), so that a wheel of the server does not carry it; in a
checkout `make env` installs both.
"""
