"""`epd plan`: what topologies will do, before they are built."""
