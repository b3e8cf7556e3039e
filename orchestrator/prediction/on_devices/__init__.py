"""Tables on devices in predictions: what they hold, what devices exchange for them, and which host tables should go
there. What a device takes to look up and update is measured with the job's own step (`dense_half`).

Read `exchanged.py` first.
"""
