"""The server: versions in memory, requests, and the program of HTTP around them."""
