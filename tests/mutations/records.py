# SPDX-License-Identifier: Apache-2.0
"""The defences that are taken away one by one, and the test of each that must then fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old` stands in `file` exactly once and becomes `new`; then `test` must fail.

    A test of C++ is a program of the build tree with the part of its cases to run, or ``replay_*`` for a
    fuzz target's corpus; a test of Python is a pytest node id.
    """

    name: str
    defence: str
    file: str
    old: str
    new: str
    test: str
    gpu: bool = False  # needs one, and kernels built from the changed tree

    @property
    def is_python(self) -> bool:
        return self.test.endswith(".py") or ".py::" in self.test


CHECK, C_API, PLAN_FILE = "cpp/src/check.cpp", "cpp/src/c_api.cpp", "cpp/src/plan_file.cpp"
HOST, RING, CLUSTER = "cpp/src/host_forward.cpp", "cuda/forward_ring.cuh", "cuda/forward_cluster.cuh"
BANK, MERGE = "cuda/bank_pass.cuh", "cuda/merge_cluster.cuh"

MUTATIONS = (
    Mutation(
        "unchecked_call",
        "arguments are judged before anything is written",
        C_API,
        "read_checked_args(args, false);\n    if (checked.num_tokens > 0) host_forward",
        "read_args(args);\n    if (checked.num_tokens > 0) host_forward",
        "test_check a_refused_call_has_written_nothing",
    ),
    Mutation(
        "overlap_with_another",
        "what is written shares no byte with another argument",
        CHECK,
        "if (overlap(a.region(), b.region()))",
        "if (false && overlap(a.region(), b.region()))",
        "test_check memory_shared_with_a_written_argument",
    ),
    Mutation(
        "overlap_with_itself",
        "rows of a bank that is written share no byte",
        CHECK,
        "if (!overlaps_itself(argument.region())) return;",
        "if (!overlaps_itself(argument.region()) || true) return;",
        "test_check strides",
    ),
    Mutation(
        "extent_overflow",
        "sizes and strides whose product passes 64 bits are refused",
        CHECK,
        "if (overflows) [[unlikely]]",
        "if (overflows && false) [[unlikely]]",
        "test_check extents_that_pass_the_address_space",
    ),
    Mutation(
        "device_alignment",
        "the native kernels get addresses that are multiples of 16 bytes",
        CHECK,
        "if (remainder != 0) [[unlikely]]",
        "if (remainder == kDeviceAlignment) [[unlikely]]",
        "test_check what_only_the_native_kernels_require",
    ),
    Mutation(
        "wrong_epsilon",
        "an epsilon that is no number is refused",
        CHECK,
        "if (!(value >= 0.0f && value <= FLT_MAX)) [[unlikely]]",
        "if (value < 0.0f || value > FLT_MAX) [[unlikely]]",
        "test_check numbers_and_options",
    ),
    Mutation(
        "struct_too_small",
        "a struct too small for the memory's description is refused",
        C_API,
        "if (struct_size < smallest) {",
        "if (struct_size < smallest && struct_size > 4096) {",
        "test_c_api struct_without_a_size_is_refused",
    ),
    Mutation(
        "struct_too_large",
        "a struct_size that was never set is not believed",
        C_API,
        "if (struct_size > kMaxStructSize || struct_size % alignof(int32_t) != 0) {",
        "if (struct_size % alignof(int32_t) != 0) {",
        "test_c_api struct_sizes_of_no_version_are_refused",
    ),
    Mutation(
        "unknown_fields",
        "fields of a newer caller that this library does not know must be 0",
        C_API,
        "if (!known) {",
        "if (!known && size == 0) {",
        "test_c_api newer_caller_is_served_unless_it_uses_what_is_unknown",
    ),
    Mutation(
        "raw_message",
        "messages are printable whatever a variable holds",
        C_API,
        "*c = printable(*c);",
        "*c = *c;",
        "test_c_api messages_are_printable_whatever_a_variable_holds",
    ),
    Mutation(
        "plan_file_size",
        "a plan file of more than 64 KiB is refused",
        PLAN_FILE,
        "if (text.size() > kMaxFileBytes) {",
        "if (text.size() > 2 * kMaxFileBytes) {",
        "test_plan_file size_is_limited",
    ),
    Mutation(
        "plan_file_text",
        "a plan file is ASCII text",
        PLAN_FILE,
        "  require_text(path, text);\n",
        "  (void)require_text;\n",
        "test_plan_file what_is_not_text_is_refused",
    ),
    Mutation(
        "plan_file_kind",
        "a plan file is a regular file",
        PLAN_FILE,
        "if (!S_ISREG(status.st_mode)) {",
        "if (S_ISLNK(status.st_mode)) {",
        "test_plan_file files_that_cannot_be_read_are_named",
    ),
    Mutation(
        "plan_file_complete",
        "a plan file serves every call of its device",
        PLAN_FILE,
        "  require_complete(path, file.back());\n  return file;",
        "  return file;",
        "test_plan_file a_device_must_be_served_to_the_end",
    ),
    Mutation(
        "float_environment",
        "subnormals and rounding do not depend on the caller's floating-point environment",
        HOST,
        "    std::fesetenv(FE_DFL_ENV);\n",
        "",
        "test_host_forward callers_float_environment_is_neither_used_nor_changed",
    ),
    Mutation(
        "one_source_by_softmax",
        "one source has weight 1, whatever its score",
        "cpp/src/host_token.inl",
        "    if (num_blocks > 0) {\n      for (int i = 0; i < num_sources; ++i) weights[i]",
        "    if (num_sources > 0) {\n      for (int i = 0; i < num_sources; ++i) weights[i]",
        "replay_call",
    ),
    Mutation(
        "merge_cancellation",
        "a merge sums the square of the mix, not of its parts, so rows that cancel keep their accuracy",
        "cpp/src/host_token.inl",
        "                               squares.even += sum.even * sum.even;\n",
        "                               squares.even += b.even * b.even * weights[0] * weights[0] +\n"
        "                                               p.even * p.even * weights[1] * weights[1] +\n"
        "                                               b.even * p.even * 2 * weights[0] * weights[1];\n",
        "test_two_phase rows_that_cancel_keep_their_accuracy",
    ),
    Mutation(
        "lse_overlap",
        "the logarithms that a bank pass leaves overwrite nothing that it reads",
        CHECK,
        "  check_arguments(list, 2, on_device);\n}\n\nvoid check_memory(const attnres_merge_args& args",
        "  check_arguments(list, 1, on_device);\n}\n\nvoid check_memory(const attnres_merge_args& args",
        "test_two_phase refusals_of_the_bank",
    ),
    Mutation(
        "merge_reads_early",
        "a merge right after its bank pass reads nothing before the pass has finished",
        "python/libattnres/nn.py",
        'pdl="wait" if mixed.is_fresh and self.pdl == "early" else self.pdl,',
        "pdl=self.pdl,",
        "tests/python/test_two_phase_stack.py::test_nothing_is_read_early_that_the_kernel_before_writes",
    ),
    Mutation(
        "pass_reads_early",
        "a bank pass reads no row before the call that wrote it has finished",
        "python/libattnres/nn.py",
        'pdl="off" if are_new else "wait" if self.pdl == "early" else self.pdl,',
        'pdl="off" if are_new else self.pdl,',
        "tests/python/test_two_phase_stack.py::test_nothing_is_read_early_that_the_kernel_before_writes",
    ),
    Mutation(
        "stale_site_weights",
        "a bank pass sees weights that were given other memory",
        "python/libattnres/nn.py",
        "        return all(\n            norm.data_ptr() == norms + index * size",
        "        return all(\n            True or norm.data_ptr() == norms + index * size",
        "tests/python/test_two_phase_stack.py::test_new_weights_are_those_of_the_next_pass",
    ),
    Mutation(
        "weights_of_inference_mode",
        "the site weights of a stack made in inference mode lie in memory of their kind",
        "python/libattnres/nn.py",
        "with torch.inference_mode(flat[0].is_inference()), torch.no_grad():",
        "with torch.inference_mode(False), torch.no_grad():",
        "tests/python/test_two_phase_stack.py::test_a_stack_made_in_inference_mode_has_weights_as_any_other",
    ),
    Mutation(
        "autograd",
        "arguments that require grad are refused rather than detached",
        "python/libattnres/_call.py",
        "if isinstance(tensor, torch.Tensor) and tensor.requires_grad:",
        "if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.numel():",
        "tests/python/test_ops.py::test_ops_raise_rather_than_detach",
    ),
    Mutation(
        "fake_kernel",
        "every op has a kernel for tensors without memory",
        "python/libattnres/_ops.py",
        "    library._register_fake(name, _placed_kernel(op, fake))\n",
        "",
        "tests/python/test_ops.py::test_fake_tensors_get_shapes",
    ),
    Mutation(
        "variable_as_module",
        "a variable names one of the backends; nothing else is imported",
        "python/libattnres/_dispatch.py",
        '(not isinstance(backend, str) or backend not in (*BACKENDS, "auto"))',
        "not isinstance(backend, str)",
        "tests/python/test_hostile_environment.py::test_a_backend_variable_imports_nothing",
    ),
    Mutation(
        "ring_wait",
        "the ring kernel reads activations only after griddepcontrol.wait",
        RING,
        "  if (T::kBankRows == 0 || !params.early) {\n    ptx::griddepcontrol_wait();",
        "  if (T::kBankRows == 0 || !params.early) {",
        "tests/python/test_races_gpu.py::test_a_late_writer_ahead_is_waited_for",
        gpu=True,
    ),
    Mutation(
        "cluster_wait",
        "the cluster kernel reads activations only after griddepcontrol.wait",
        CLUSTER,
        "  if (!early) ptx::griddepcontrol_wait();\n",
        "",
        "tests/python/test_races_gpu.py::test_a_late_writer_ahead_is_waited_for",
        gpu=True,
    ),
    Mutation(
        "ring_statistics_buffer",
        "a chunk's partial sums do not overwrite those that other warps still read",
        RING,
        "chunk_buffer_ ^= 1;",
        "",
        "tests/python/test_races_gpu.py::test_a_hundred_runs_give_the_same_bits",
        gpu=True,
    ),
    Mutation(
        "early_trigger",
        "a launch that writes a bank row lets dependents start only after its stores",
        RING,
        "  if (T::kStaticCommonPath || params.block_write_idx < 0) ptx::griddepcontrol_launch_dependents();",
        "  ptx::griddepcontrol_launch_dependents();",
        "tests/python/test_races_gpu.py::test_a_dependent_that_waits_sees_all_and_disturbs_nothing",
        gpu=True,
    ),
    Mutation(
        "wide_offsets",
        "offsets in a bank of more than 4 GiB are of 64 bits",
        RING,
        "blocks + int64_t{entry} * params.blocks_token_stride;",
        "blocks + static_cast<int32_t>(entry * params.blocks_token_stride);",
        "tests/python/test_memory_gpu.py::test_offsets_beyond_32_bits",
        gpu=True,
    ),
    Mutation(
        "bank_wait",
        "the bank pass reads rows only after griddepcontrol.wait",
        BANK,
        "  const Share<T> share(params);\n  ptx::griddepcontrol_wait();\n",
        "  const Share<T> share(params);\n",
        "tests/python/test_races_gpu.py::test_a_late_writer_ahead_of_a_bank_pass_is_waited_for",
        gpu=True,
    ),
    Mutation(
        "merge_wait",
        "a merge reads the prefix and delta only after griddepcontrol.wait, early or not",
        MERGE,
        "  if (early) ptx::griddepcontrol_wait();\n",
        "",
        "tests/python/test_races_gpu.py::test_a_late_writer_ahead_of_a_merge_is_waited_for",
        gpu=True,
    ),
)
