"""The survey's claims beside what jtrain predicts, what compilers say and what was measured."""
