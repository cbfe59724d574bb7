// Keeps the FP8 panel in Settings > Optimizations true after settings were applied.
onOptionsChanged(function() {
    const refresh = gradioApp().getElementById('fp8_status_refresh');
    if (refresh) refresh.click();
});
