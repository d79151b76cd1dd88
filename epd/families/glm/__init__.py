"""GLM-4.1V, 4.5V and 4.6V, and GLM-OCR."""

ADAPTERS = {
    "glm4v": "epd.families.glm.adapter:Glm4v",
    "glm46v": "epd.families.glm.adapter:Glm46V",
    "glm_ocr": "epd.families.glm.adapter:GlmOcr",
    "glm4v_moe": "epd.families.glm.adapter:Glm4vMoe",
}
CHECKPOINTS = {
    "glm4v": "zai-org/GLM-4.1V-9B-Thinking",
    "glm46v": "zai-org/GLM-4.6V-Flash",
    "glm_ocr": "zai-org/GLM-OCR",
    "glm4v_moe": "zai-org/GLM-4.5V zai-org/GLM-4.6V",
}
