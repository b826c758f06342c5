"""For tests that try many points of a grid, the points that `make test` takes; `make test ARGS=--exhaustive` takes all.

    "test_dqn.py::test_the_same_bits_on_any_devices": ("True",)

runs `[True]` and leaves out `[False]`, unless --exhaustive is given or the command names the point itself.
Only tests that take seconds are listed.  `()` leaves a test out, because another shows the same with less.
"""

from fnmatch import fnmatchcase

from _pytest.nodes import Item

KEPT = {
    "test_bisect.py::test_a_planted_fault_is_found_and_named": (
        *("one bit of a shard*", "a result that*", "a stale*", "a target network*"),
    ),
    "test_collect.py::test_same_seeds_give_the_same_rollouts": ("atari-lstm", "catch", "cartpole-lstm"),
    "test_collect.py::test_several_threads_on_several_devices_record_what_one_thread_does": (
        *("catch-scanned", "cartpole-lstm-stepped"),
    ),
    "test_convolution.py::test_a_processor_with_other_vectors_ends_in_the_same_bits": (
        *("its blocks' second-avx512", "its blocks' second-neon", "its second-avx", "three planes-neon"),
        *("few features-avx", "a stage's first-avx512", "a stage's first-neon"),
    ),
    "test_continuous.py::test_every_placement_ends_in_the_same_bits": ("three-ppo",),
    "test_dqn.py::test_of_two_processes_one_is_killed_and_one_alone_goes_on_to_the_same_bits": ("r2d2*",),
    "test_dqn.py::test_the_loss_is_the_papers": ("{}", "*huber*dueling*", "*prioritised*"),
    "test_dqn.py::test_the_same_bits_on_any_devices": ("True",),
    "test_dqn.py::test_values_converge_to_the_known_ones": ("*double*", "*prioritised*"),
    "test_export.py::test_every_algorithm_and_network_is_exported": (
        *("*-onnx", "ppo, two LSTMs-stablehlo", "ppo, dictionaries and masks-stablehlo", "r2d2, codes-stablehlo"),
        *("sac-stablehlo",),
    ),
    "test_gpu.py::test_acting_neither_scatters_nor_sorts": (
        *("scanned-*", "stepped-ppo-lstm", "stepped-dqn-nature", "stepped-r2d2-nature"),
    ),
    "test_gpu.py::test_an_update_scatters_nothing_and_sorts_only_what_is_listed": (
        *("ppo-lstm", "ppo-bfloat16", "impala-resnet", "dqn-nature", "pqn-bfloat16", "r2d2-lstm", "sac-nature"),
        *("td3-mlp",),
    ),
    "test_gpu.py::test_float32_is_float32_in_every_product_unless_asked_otherwise": ("ppo", "r2d2"),
    "test_impala.py::test_any_number_of_devices_learns_the_same_bits": ("0.5-4-2", "1.0-2-2"),
    "test_impala.py::test_every_placement_ends_in_the_same_bits": (
        *("a0-l0,1-in turns", "a0-l1,2,3-concurrent", "a0,1-l2,3-concurrent"),
    ),
    "test_kernels.py::test_every_algorithm_trains_without_them": ("impala",),
    "test_kernels.py::test_updates_and_acting_of_every_algorithm_have_them_or_not_as_the_experiment_says": (
        *("auto-*", "off-r2d2", "off-sac"),
    ),
    "test_learning.py::test_it_solves": ("*-CartPole-v1-1",),
    "test_memory.py::test_a_kill_while_memory_is_written_leaves_the_checkpoint_before_and_no_more": (),
    "test_memory.py::test_killed_at_random_instants_it_ends_in_the_same_bits": (),
    "test_memory.py::test_one_process_remembers_the_same_on_any_devices": ("*-stepped",),
    "test_memory.py::test_several_processes_remember_the_same": ("3-*",),
    "test_mlp.py::test_other_processors_end_in_the_same_bits": ("avx512-1", "avx512-40", "avx-40", "neon-3"),
    "test_normalisation.py::test_other_processors_end_in_the_same_bits": (
        *("1025-32-avx512", "1025-32-neon", "40-84-avx", "300-513-neon"),
    ),
    "test_off_policy.py::test_killed_it_goes_on_to_the_same_bits": ("sac",),
    "test_off_policy.py::test_the_same_bits_on_any_devices": ("sac",),
    "test_off_policy.py::test_two_gradient_steps_on_two_shards_are_those_of_one_batch": ("td3",),
    "test_placement.py::test_a_sum_in_an_order_of_its_own_is_seen": (),  # test_shards.py plants the same fault
    "test_placement.py::test_another_experiment_gives_other_bits": ("num_shards", "num_actors", "env_epoch"),
    "test_placement.py::test_minibatches_drawn_by_the_number_of_the_device_are_seen": (),  # and this one
    "test_placement.py::test_one_process_gives_the_same_bits_on_any_devices": ("*-concurrent", "a0-l1,2,3-alternating"),
    "test_placement.py::test_several_processes_give_the_same_bits": ("2 x a0-l0,1,2",),
    "test_placement.py::test_the_readmes_placements_are_one_experiment": (
        *("a0-l0,1-ppo", "a0-l1,2,3,4,5,6-ppo", "a0-l1,2,3-impala"),
    ),
    "test_ppo.py::test_a_gpu_learns_the_same_from_values_of_some_steps_at_a_time": ("1-none", "3-lstm"),
    "test_ppo.py::test_shards_learn_the_same_bits_on_one_device_and_on_one_each": (
        *("none-6-*", "lstm-4-*", "none-3-*", "lstm-2-*"),
    ),
    "test_product.py::test_a_processor_with_other_vectors_ends_in_the_same_bits": (
        *("*29, 257, 17*-avx512", "*29, 257, 17*-neon", "*33, 50, 48*-avx", "*600, 31, 1*-neon"),
    ),
    "test_records.py::test_a_collector_goes_on_from_where_another_stood": (
        *("scanned", "stepped-lstm", "jax-stepped", "quantities", "python"),
    ),
    "test_recurrent.py::test_a_feed_forward_policy_stays_at_chance": ("ppo-50",),
    "test_recurrent.py::test_every_placement_ends_in_the_same_bits": ("impala-scanned", "pqn-stepped"),
    "test_recurrent.py::test_in_a_run_the_learner_evaluates_what_the_actors_did": ("ppo-1-1-*", "impala-4-2-*"),
    "test_recurrent.py::test_the_runs_metrics_notice_a_carry_that_went_astray": ("ppo",),
    "test_replay.py::test_memory_holds_what_slow_memory_holds": ("1-11-1-2-1", "7-9-1-3-4"),
    "test_replay.py::test_what_may_be_sampled_has_a_priority_and_nothing_else": ("3-30-2-1-5-1",),
    "test_resume.py::test_a_finished_run_made_longer_ends_in_the_bits_of_a_run_of_that_length": ("td3",),
    "test_resume.py::test_killed_again_and_again_it_ends_in_the_same_bits": ("ppo",),
    "test_sequences.py::test_whole_sequences_are_those_of_slow_memory_with_their_priorities": ("5-31-*", "3-17-*"),
    "test_uneven.py::test_a_run_goes_on_from_any_number_of_devices_to_any_other": ("r2d2",),
    "test_verify.py::test_a_part_of_a_kept_run_is_computed_again": (),  # `make verify` does that, and CI calls it
    "test_verify.py::test_a_part_of_a_run_computed_again_has_the_same_digests": ("ppo-0-4-*", "dqn-*"),
}


def point_of(item: Item) -> tuple[str, str]:
    """The test that an item belongs to, as KEPT names it, and its point of the grid."""
    test, _, point = item.name.partition("[")
    return f"{item.path.name}::{test}", point.removesuffix("]")


def is_kept(item: Item) -> bool:
    test, point = point_of(item)
    return test not in KEPT or any(fnmatchcase(point, pattern) for pattern in KEPT[test])


def unknown(items: list[Item]) -> list[str]:
    """The entries of KEPT that match no test or no point, for files in which tests were found."""
    there: dict[str, list[str]] = {}
    for item in items:
        test, point = point_of(item)
        there.setdefault(test, []).append(point)
    files = {item.path.name for item in items}
    return [
        f"{test}[{pattern}]"
        for test, patterns in KEPT.items()
        if test.partition("::")[0] in files
        for pattern in patterns
        if not any(fnmatchcase(point, pattern) for point in there.get(test, []))
    ]
