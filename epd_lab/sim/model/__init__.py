"""Small configurations searched exhaustively, over the same tables that run."""
