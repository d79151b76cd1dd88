"""PaddleOCR-VL."""

ADAPTERS = {
    "paddleocr_vl": "epd.families.paddleocr_vl.adapter:PaddleOcrVl",
}
CHECKPOINTS = {
    "paddleocr_vl": "PaddlePaddle/PaddleOCR-VL",
}
