"""reporting/table.py: a row for each step that can be read at 120 columns."""

from reporting import table
from reporting.metrics import GLOSSARY

LONGEST = {
    "train/return_mean": 0.512,
    "train/success_rate": 1.0,
    "train/turns_mean": 28.5,
    "train/groups": 128,
    "train/groups_zero_variance": 16,
    "policy/loss": -123.4567,
    "policy/kl": 12.34567,
    "policy/entropy": 10.123,
    "policy/grad_norm": 1234.567,
    "time/rollout_s": 12345.6,
    "time/update_s": 12345.6,
    "eval/avg": 1.0,
}


def test_every_row_is_as_wide_as_its_heading_and_fits_120_columns():
    assert {name for _, name, _ in table.COLUMNS} - {"signal"} <= set(GLOSSARY)
    rows = [
        table.row(1, {}),
        table.row(99999, {"train/return_mean": 0.5, "policy/loss": -123.4567, "eval/avg": 1.0}),
        table.row(
            7, {"train/groups": 64, "train/groups_zero_variance": 3, "policy/kl": float("nan")}
        ),
        table.row(1000, LONGEST, 1000, left_s=25.5 * 86400),
    ]
    assert {len(row) for row in rows} == {len(table.header())}
    assert len(table.header()) < 120
    assert rows[0].split() == ["1"] + ["-"] * (len(table.COLUMNS) + 1)
    assert "61/64" in rows[2]
    assert len(rows[3].split()) == len(table.COLUMNS) + 3  # "25.5 days" is two words


def test_a_row_says_which_step_of_how_many_it_is_and_how_long_the_rest_takes():
    row = table.row(12, {"train/return_mean": 0.5}, last_step=60, left_s=41 * 60)
    assert row.split()[0] == "12/60" and row.endswith("   41 min")
    assert table.row(60, {}, last_step=60, left_s=0.0).endswith(" -")
