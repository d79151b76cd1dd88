"""DeepSeek-OCR 2."""

ADAPTERS = {
    "deepseek_ocr2": "epd.families.deepseek_ocr2.adapter:DeepseekOcr2",
}
CHECKPOINTS = {
    "deepseek_ocr2": "deepseek-community/DeepSeek-OCR-2",
}
