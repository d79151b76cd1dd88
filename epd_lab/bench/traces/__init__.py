"""`epd bench trace`: a day as it was, against a server or in the simulator."""
