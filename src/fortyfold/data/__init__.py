"""From JPEG files to batches: order → bytes → crop box → pixels → Batch."""
