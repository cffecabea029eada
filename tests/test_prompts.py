"""Lists of prompts: three formats, one line for each mistake."""

import pytest

from ddrl_jax.data.prompts import MAX_LINE, Prompt, read_prompts


def written(folder, name, content):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_three_formats_say_the_same(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/first.png").touch()
    image = tmp_path / "in" / "first.png"
    rows = (
        '{"caption": "a cat, asleep"}\n\n{"prompt": " a \\"dog\\" ", "image": "in/first.png", "name": "dog", "x": 1}\n'
    )
    expected = [Prompt("00000", "a cat, asleep"), Prompt("dog", 'a "dog"', image)]
    assert read_prompts(written(tmp_path, "a.jsonl", rows)) == expected
    cells = 'name,Prompt,image,score\r\n,"a cat, asleep",,1\r\ndog," a ""dog"" ",in/first.png,2\r\n'
    assert read_prompts(written(tmp_path, "a.csv", cells)) == expected
    assert read_prompts(written(tmp_path, "a.txt", 'a cat, asleep\n\n  a "dog"')) == [
        expected[0],
        Prompt("00001", 'a "dog"'),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    content = {"a.jsonl": '{"caption": "é"}', "a.csv": "caption\né", "a.txt": "é"}[name]
    assert read_prompts(written(tmp_path, name, b"\xef\xbb\xbf" + content.encode())) == [Prompt("00000", "é")]


def test_a_cell_may_have_several_lines(tmp_path):
    prompts = read_prompts(written(tmp_path, "a.csv", 'caption,name\n"one\ntwo",x\nthree,y\n'))
    assert prompts == [Prompt("x", "one\ntwo"), Prompt("y", "three")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{}", r"a\.json: must end in \.jsonl, \.csv, \.txt"),
        ("a.txt", "", r"a\.txt: has no prompts"),
        ("a.txt", "\n \n", r"a\.txt: has no prompts"),
        ("a.jsonl", "\n", r"a\.jsonl: has no prompts"),
        ("a.csv", "caption\n", r"a\.csv: has no prompts"),
        ("a.txt", b"ok\n\xff\n", r"a\.txt:2: is not UTF-8"),
        ("a.txt", "ok\n" + "x" * (MAX_LINE + 1), rf"a\.txt:2: is longer than {MAX_LINE} bytes"),
        ("a.jsonl", '{"caption": "a"}\n{"caption": ', r"a\.jsonl:2: is not JSON: "),
        ("a.jsonl", "[" * 50_000, r"a\.jsonl:1: is not JSON: "),
        ("a.jsonl", '["a"]', r"a\.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"caption": 3}', r"a\.jsonl:1: caption must be text, not 3"),
        ("a.jsonl", '{"text": "a"}', r"a\.jsonl:1: must have one of caption and prompt, not empty"),
        ("a.jsonl", '{"caption": " "}', r"a\.jsonl:1: must have one of caption and prompt, not empty"),
        ("a.jsonl", '{"caption": "a", "prompt": "b"}', r"a\.jsonl:1: must have one of caption and prompt"),
        ("a.jsonl", '{"caption": "a", "image": "no.png"}', r"a\.jsonl:1: image 'no\.png' is not a file in "),
        ("a.jsonl", '{"caption": "a", "name": "../b"}', r"a\.jsonl:1: name '\.\./b' cannot be the name of a file"),
        ("a.jsonl", '{"caption": "a", "name": "b/c"}', r"a\.jsonl:1: name 'b/c' cannot be the name of a file"),
        ("a.jsonl", '{"caption": "a", "name": "b"}\n{"caption": "c", "name": "b"}', r":2: name 'b' is that of line 1"),
        ("a.jsonl", '{"caption": "a", "name": "00001"}\n{"caption": "c"}', r":2: name '00001' is that of line 1"),
        ("a.csv", "text\na\n", r"a\.csv:1: the header must name a column caption or prompt"),
        ("a.csv", "caption,caption\na,b\n", r"a\.csv:1: the header names a column twice"),
        ("a.csv", "caption,name\nx,y\na, b, c\n", r"a\.csv:3: has 3 cells, the header has 2"),
        ("a.csv", 'caption\n"a\n', r"a\.csv:2: is not CSV: "),
        ("a.csv", "caption,name\n,x\n", r"a\.csv:2: must have one of caption and prompt"),
        ("a.csv", "caption\na\n\n" + "x" * (MAX_LINE + 1), rf"a\.csv:4: is longer than {MAX_LINE} bytes"),
    ],
)
def test_mistakes_are_one_line_with_their_place(tmp_path, name, content, message):
    file = written(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt: cannot be read: No such file"):
        read_prompts(tmp_path / "a.txt")
