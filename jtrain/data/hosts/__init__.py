"""Reading shared among the hosts of a run: each document is read and tokenised by one of them."""
