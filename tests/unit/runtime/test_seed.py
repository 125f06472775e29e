"""Derived numbers: pinned, because every run that resumes and every split made before depends on them."""

from headway.runtime.seed import derive

PINNED = (1_400_599_875_718_083_851, 2_782_628_694_157_286_928, 3_012_038_005_124_571_718)


def test_numbers_are_those_of_every_earlier_release() -> None:
    assert derive(0) == PINNED[0]
    assert derive(1, "init", "model.norm.weight") == PINNED[1]
    assert derive(-3, "microbatch", 7, 2) == PINNED[2]


def test_every_part_its_kind_and_where_it_ends_counts() -> None:
    seeds = [
        derive(0, "ab", "c"),
        derive(0, "a", "bc"),
        derive(0, "abc"),
        derive(0, "c", "ab"),
        derive(1, "ab", "c"),
        derive(0, 1),
        derive(0, 1, 0),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= number < 2**63 for number in seeds)
    as_text = derive(0, (1).to_bytes(16, "little").decode())
    assert as_text != derive(0, 1)
