"""How tests carry the calls of a device process."""

import pickle


class Pickled:
    """As `Packing`, for values whose classes can be imported."""

    def pack(self, value):
        return pickle.dumps(value)

    def unpack(self, content):
        return pickle.loads(content)  # noqa: S301 - of this process


PICKLED = Pickled()
