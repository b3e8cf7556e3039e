"""The program as people get it: built, installed, cloned, or sent to a Ray cluster, beside folders of their own."""
