"""The update formulas of the Keras optimizers in float64 numpy, written apart from the package: the reference of the
tests.

One class per optimizer; `step(gradients)` moves `self.values` in place. Dense gradients only: a gradient of rows is the
same dense one with zeros, for every optimizer here.
"""

from __future__ import annotations

import numpy as np


class Oracle:
    def __init__(self, values, **options):
        self.values = [np.array(one, np.float64) for one in values]
        self.options = {**self.defaults(), **options}
        self.steps = 0
        self.slots = [self.first_slots(one) for one in self.values]

    def step(self, gradients, rate=None):
        self.steps += 1
        rate = self.options["learning_rate"] if rate is None else rate
        self.before_step()
        for index, gradient in enumerate(gradients):
            gradient = np.asarray(gradient, np.float64)
            self.values[index] = self.moved(self.values[index], gradient, self.slots[index], rate)

    def before_step(self):
        pass

    def defaults(self):
        raise NotImplementedError

    def first_slots(self, value):
        return {"m": np.zeros_like(value), "v": np.zeros_like(value), "h": np.zeros_like(value)}

    def moved(self, w, g, s, lr):
        raise NotImplementedError


class SGD(Oracle):
    def defaults(self):
        return {"learning_rate": 0.01, "momentum": 0.0, "nesterov": False}

    def moved(self, w, g, s, lr):
        p = self.options["momentum"]
        s["m"] = p * s["m"] - lr * g
        return w + (p * s["m"] - lr * g if self.options["nesterov"] else s["m"])


class Adagrad(Oracle):
    def defaults(self):
        return {"learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7}

    def first_slots(self, value):
        return {"a": np.full_like(value, self.options["initial_accumulator_value"])}

    def moved(self, w, g, s, lr):
        s["a"] = s["a"] + g**2
        return w - lr * g / np.sqrt(s["a"] + self.options["epsilon"])


class Adadelta(Oracle):
    def defaults(self):
        return {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7}

    def moved(self, w, g, s, lr):
        rho, eps = self.options["rho"], self.options["epsilon"]
        s["v"] = rho * s["v"] + (1 - rho) * g**2
        delta = np.sqrt(s["m"] + eps) / np.sqrt(s["v"] + eps) * g
        s["m"] = rho * s["m"] + (1 - rho) * delta**2
        return w - lr * delta


class Adam(Oracle):
    def defaults(self):
        return {
            "learning_rate": 0.001,
            "beta_1": 0.9,
            "beta_2": 0.999,
            "epsilon": 1e-7,
            "amsgrad": False,
            "weight_decay": 0.0,
        }

    def moved(self, w, g, s, lr):
        b1, b2, t = self.options["beta_1"], self.options["beta_2"], self.steps
        w = w - w * lr * self.options["weight_decay"]
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = b2 * s["v"] + (1 - b2) * g**2
        s["h"] = np.maximum(s["h"], s["v"]) if self.options["amsgrad"] else s["v"]
        alpha = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
        return w - alpha * s["m"] / (np.sqrt(s["h"]) + self.options["epsilon"])


class AdamW(Adam):
    def defaults(self):
        return {**super().defaults(), "weight_decay": 0.004}


class Adamax(Adam):
    def moved(self, w, g, s, lr):
        b1, b2, t = self.options["beta_1"], self.options["beta_2"], self.steps
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = np.maximum(b2 * s["v"], np.abs(g))
        return w - lr / (1 - b1**t) * s["m"] / (s["v"] + self.options["epsilon"])


class Nadam(Adam):
    product = 1.0

    def momentum_at(self, t):
        return self.options["beta_1"] * (1 - 0.5 * 0.96**t)

    def before_step(self):
        self.product *= self.momentum_at(self.steps)

    def moved(self, w, g, s, lr):
        b1, b2, t = self.options["beta_1"], self.options["beta_2"], self.steps
        now, after = self.momentum_at(t), self.momentum_at(t + 1)
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = b2 * s["v"] + (1 - b2) * g**2
        ahead = after * s["m"] / (1 - self.product * after) + (1 - now) * g / (1 - self.product)
        return w - lr * ahead / (np.sqrt(s["v"] / (1 - b2**t)) + self.options["epsilon"])


class RMSprop(Oracle):
    def defaults(self):
        return {"learning_rate": 0.001, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False}

    def moved(self, w, g, s, lr):
        rho = self.options["rho"]
        s["v"] = rho * s["v"] + (1 - rho) * g**2
        if self.options["centered"]:
            s["h"] = rho * s["h"] + (1 - rho) * g**2
            s["v"] = s["v"] - s["h"] ** 2
        with np.errstate(invalid="ignore"):  # a centered velocity may be negative
            root = np.sqrt(s["v"])
        s["m"] = self.options["momentum"] * s["m"] + g / (root + self.options["epsilon"])
        return w - lr * s["m"]


class Ftrl(Oracle):
    def defaults(self):
        return {
            "learning_rate": 0.001,
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 0.0,
            "l2_regularization_strength": 0.0,
            "l2_shrinkage_regularization_strength": 0.0,
            "beta": 0.0,
        }

    def first_slots(self, value):
        return {"n": np.full_like(value, self.options["initial_accumulator_value"]), "z": np.zeros_like(value)}

    def moved(self, w, g, s, lr):
        o = self.options
        power, l1 = -o["learning_rate_power"], o["l1_regularization_strength"]
        l2 = o["l2_regularization_strength"] + o["beta"] / (2 * lr)
        n = s["n"] + g**2
        s["z"] = s["z"] + g + 2 * o["l2_shrinkage_regularization_strength"] * w - (n**power - s["n"] ** power) / lr * w
        s["n"] = n
        thresholded = np.where(np.abs(s["z"]) <= l1, 0.0, np.sign(s["z"]) * l1 - s["z"])
        return thresholded / (n**power / lr + 2 * l2)
