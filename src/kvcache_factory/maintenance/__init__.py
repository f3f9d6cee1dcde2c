"""Looking after the directory of a disk tier from outside: what is in it, whether it is whole, and what may go."""
