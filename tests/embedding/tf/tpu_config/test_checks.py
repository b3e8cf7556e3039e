"""The general checks of a configuration, and the error they raise."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.tf.tpu_config.checks import (
    UnsupportedConfigField,
    as_float32,
    reject_enum,
    reject_unknown_fields,
)
from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration, parse_config


def test_the_error_names_table_and_field_and_survives_a_process_boundary():
    error = UnsupportedConfigField("user", "dimension", "Found 0. Expected at least 1. Set it.")
    assert isinstance(error, ValueError)
    assert str(error) == "Table 'user', field 'dimension': Found 0. Expected at least 1. Set it."
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.table, copy.field) == (str(error), "user", "dimension")
    assert str(UnsupportedConfigField(None, "mode", "Found 3.")) == "Configuration, field 'mode': Found 3."


@given(st.floats(allow_nan=False))
def test_numbers_are_rounded_to_float32_or_refused(value):
    if math.isinf(value) or abs(value) < 3.4028235e38:
        assert as_float32(value, table="t", field="f") == np.float32(value)
    elif abs(value) > 3.4028236e38:
        with pytest.raises(UnsupportedConfigField, match="fits in a float32"):
            as_float32(value, table="t", field="f")


@pytest.mark.parametrize("value", ["1", None, [1.0], 10**400])
def test_what_is_no_number(value):
    with pytest.raises(UnsupportedConfigField, match="Table 't', field 'f': Found"):
        as_float32(value, table="t", field="f")


def test_unknown_fields_at_any_depth():
    nested = bytes([0x0A, 5, 0x2A, 3, 0xF8, 0x7F, 1])
    message = parse_config(nested)
    with pytest.raises(UnsupportedConfigField) as raised:
        reject_unknown_fields(message, table=None)
    assert raised.value.field == "table_descriptor.optimization_parameters.2047"
    reject_unknown_fields(message, table=None, without=frozenset({"table_descriptor"}))


def test_enums():
    message = TPUEmbeddingConfiguration(mode=2)
    reject_enum(message, "mode", supported=("TRAINING",), table=None, remedy="")
    with pytest.raises(
        UnsupportedConfigField, match=r"Found 2 \(TRAINING\)\. Expected INFERENCE or UNSPECIFIED\. Do\."
    ):
        reject_enum(message, "mode", supported=("INFERENCE", "UNSPECIFIED"), table=None, remedy="Do.")
    message.mode = 9
    with pytest.raises(UnsupportedConfigField, match=r"field 'a\.mode': Found 9 \(an unknown value\)"):
        reject_enum(message, "mode", supported=("TRAINING",), table=None, path="a.", remedy="")
