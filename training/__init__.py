"""All that made the bundled model: painters of images, questions about them, training, evaluation.

Importing this package, or any module of it that paints, asks or samples, loads neither torch nor
transformers.
"""
