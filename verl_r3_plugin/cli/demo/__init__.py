"""The demo: one whole R3 loop on one CPU machine, every part the real one."""
