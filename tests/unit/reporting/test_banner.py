from gptpar.reporting.banner import WIDTH, Row, Section, banner


def test_rows_are_aligned_over_all_sections():
    text = banner(
        [
            Section("model", [Row("parameters", "124,475,904"), Row("ffn size", "3072", "4 x hidden")]),
            Section("empty", []),
            Section("batch", [Row("global", "8", "micro-batch 4 x 2 data-parallel processes")]),
        ]
    )
    assert text.split("\n") == [
        "--- model " + "-" * 90,
        "  parameters  124,475,904",
        "  ffn size    3072  (4 x hidden)",
        "--- batch " + "-" * 90,
        "  global      8  (micro-batch 4 x 2 data-parallel processes)",
    ]


def test_long_text_goes_on_under_its_value():
    lines = banner([Section("data", [Row("files", "part " * 40, "x" * 150)])]).split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert all(line.startswith(" " * 9) for line in lines[2:])
    assert "".join(lines).count("part") == 40
