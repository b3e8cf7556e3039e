"""What is read in the text of a compiled program."""

from __future__ import annotations

from podembed.tools.preflight.memory_traffic import accessed_in_memory
from podembed.tools.preflight.program_text import Collective, array_bytes, collectives_in, flaws_in

COLLECTIVES = """
  %psum = f32[1024]{0:T(1024)S(1)} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %other = bf16[8,128]{1,0} all-reduce-start(%y), replica_groups=[2,4]<=[8], to_apply=%add
  %routed = (f32[1,16]{1,0}, f32[1,16]{1,0}) all-to-all(%a, %b), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %near = (s8[64]{0}, s8[64]{0}, u32[], u32[]) collective-permute-start(%c), source_target_pairs={{0,1},{1,0}}
  %own = f32[4]{0} all-reduce(%z), replica_groups={{0},{1}}, to_apply=%add
  ROOT %sum = f32[4]{0} add(%own, %own), metadata={op_name="all-reduce("}
"""


def test_collectives_are_counted_with_their_bytes() -> None:
    found = collectives_in(COLLECTIVES, num_devices=8)
    assert found == [
        Collective(kind="all-reduce", group=4, count=2, size_bytes=4096 + 2048),
        Collective(kind="all-to-all", group=2, count=1, size_bytes=128),
        Collective(kind="collective-permute", group=8, count=1, size_bytes=64),
    ]
    assert [one.sent_bytes for one in found] == [2 * 3 / 4 * 6144, 64, 64]


def test_arrays_in_fast_memory_are_told_apart() -> None:
    text = "(f32[2,128]{1,0:T(8,128)S(1)}, bf16[3]{0:T(256)}, pred[], u4[3])"
    assert array_bytes(text) == 1024 + 6 + 1 + 2
    assert array_bytes(text, is_main=True) == 6 + 1 + 2


PROGRAM = """
%fused (param_0: f32[100,128], param_1: s32[4]) -> f32[4,128] {
  %param_0 = f32[100,128]{1,0:T(8,128)} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = f32[4,128]{1,0:T(8,128)S(1)} gather(%param_0, %param_1), offset_dims={1}
}

%written (param_0: f32[100,128], param_1: s32[4], param_2: f32[4,128]) -> f32[100,128] {
  %param_0.1 = f32[100,128]{1,0:T(8,128)} parameter(0)
  %param_1.1 = s32[4]{0} parameter(1)
  %param_2.1 = f32[4,128]{1,0:T(8,128)S(1)} parameter(2)
  ROOT %scatter.1 = f32[100,128]{1,0:T(8,128)} scatter(%param_0.1, %param_1.1, %param_2.1), to_apply=%set
}

%body (loop: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %loop = (s32[], f32[8,128]{1,0}) parameter(0)
  %one = f32[8,128]{1,0} get-tuple-element(%loop), index=1
  %next = f32[8,128]{1,0} negate(%one)
  ROOT %both = (s32[], f32[8,128]{1,0}) tuple(%loop, %next)
}

ENTRY %main (table: f32[100,128], ids: s32[4], x: f32[8,128]) -> f32[100,128] {
  %table = f32[100,128]{1,0:T(8,128)} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %x = f32[8,128]{1,0} parameter(2)
  %rows = f32[4,128]{1,0:T(8,128)S(1)} fusion(%table, %ids), kind=kCustom, calls=%fused
  %init = (s32[], f32[8,128]{1,0}) tuple(%ids, %x)
  %turned = (s32[], f32[8,128]{1,0}) while(%init), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %after = f32[100,128]{1,0:T(8,128)} fusion(%table, %ids, %rows), kind=kCustom, calls=%written
}
"""


def test_of_a_table_what_is_gathered_and_scattered_counts() -> None:
    row, ids = 4 * 128 * 4, 16
    gathered, scattered, loop = row + ids, 2 * row + ids, 3 * 2 * 8 * 128 * 4
    assert accessed_in_memory(PROGRAM) == gathered + scattered + loop


def test_what_does_not_belong_in_a_step_is_named() -> None:
    table = (100, 128)
    assert flaws_in("tensor<4xf32>", PROGRAM, tables=[table]) == []
    copied = "  %copy.1 = f32[100,128]{0,1:T(8,128)} copy(%table)\n"
    called = "%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%arg0)"
    sent = '%2 = "stablehlo.send"(%0, %1) <{channel_handle = #handle, is_host_transfer = true}>'
    between_slices = "  %send = (f32[2], u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true\n"
    assert flaws_in("", between_slices, tables=[]) == []
    (copy,) = flaws_in("", PROGRAM + copied, tables=[table])
    assert copy.startswith("a copy of a table of 100 x 128")
    begun = "  %copy-start.1 = (f32[100,128]{0,1}, f32[100,128]{1,0}, u32[]{:S(2)}) copy-start(%table)\n"
    assert flaws_in("", begun, tables=[table]) == [copy]
    near = "  %copy.1 = f32[100,128]{0,1:T(8,128)S(1)} copy(%table)\n"
    assert flaws_in("", near, tables=[table]) == flaws_in("", copied, tables=[(7, 128)]) == []
    # The way back from there.
    back = "  %copy-start.2 = (f32[100,128]{1,0}, f32[100,128]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%near)\n"
    near += "  %back = f32[100,128]{0,1} copy(%copy.1)\n"
    assert flaws_in("", near + back, tables=[table]) == []
    changed = "  %copy.2 = pred[100]{0:T(512)} copy(%changed)\n"
    assert flaws_in("", changed + copied, tables=[(100,), table]) == [copy]
    for text in (called, sent):
        (call,) = flaws_in(text, "", tables=[])
        assert call.startswith("a call to the host")
    for double in ("tensor<f64>", "tensor<4x2xf64>", "tensor<3xcomplex<f64>>"):
        (found,) = flaws_in(double, "", tables=[])
        assert found.startswith("float64")
