"""A tower and a connector that make SmolLM2-135M-Instruct read painted pictures: an Idefics3.

The language model stays as its package has it.  `graft.safetensors` (Apache-2.0) is all that is
made here, by `train` on one H200 in two parts of 420 and 425 s.  Of its 7,068 steps the first 1,531
were of 128 pictures, without the language model; the rest of 64.
`python -m training.graft.checkpoint` joins both to a checkpoint.
"""
