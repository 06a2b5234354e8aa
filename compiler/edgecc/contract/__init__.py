"""What a checkpoint, or a target with its draft, has to fulfil, told from metadata alone.

`examination` lifts the checkpoints and runs the rules that lifting leaves out, `rules` has all
rules by theme, `report` and `precision` say what `edgecc check` shows. A compile starts with the
same examination.
"""
